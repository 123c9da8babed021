"""``torchrun --nproc-per-node 8 -m sscd_vec.trainer photos/ --out run/``: the same command."""

from sscd_vec.cli.train import main

if __name__ == "__main__":
    main()
