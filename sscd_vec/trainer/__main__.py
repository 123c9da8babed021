"""``sscd-vec train`` for torchrun: ``torchrun -m sscd_vec.trainer images/ --out run/``."""

from sscd_vec.cli.train import main

if __name__ == "__main__":
    main()
