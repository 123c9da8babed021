"""``python -m sscd_vec`` is the command ``sscd-vec``."""

from sscd_vec.cli import main

if __name__ == "__main__":
    main()
