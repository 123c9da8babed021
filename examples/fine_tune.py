"""Train the shipped model further on images like yours, then use the result in a bank.

python examples/fine_tune.py photos/ --out run/ --steps 100

Some hundred images or more, and some minutes on two CPU cores. It says whether training helped; if
not, run/ holds the weights it started from.
"""

import argparse

from sscd_vec import Bank, models
from sscd_vec.trainer import TrainConfig, Trainer


def main() -> None:
    """Start from the shipped weights, train, and open a bank with the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", help="folder, tar shards or list of images")
    parser.add_argument("--out", default="run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--size", type=int, default=160, help="pixels of a training view")
    arguments = parser.parse_args()

    config = TrainConfig(
        trunk="efficientnet_lite0",
        init_from=str(models.resolve()),
        dim=512,
        size=arguments.size,
        inference_size=224,
        size_mode="short",
        optimizer="adamw",
        learning_rate=3e-5,  # higher rates first undo what the weights know
        batch=arguments.batch,
        steps=arguments.steps,
        entropy_weight=8.0,
        frozen_stages=3,
        frozen_batch_norm=True,
        ema=0.98,
        holdout=0.2,
    )
    result = Trainer(config).fit(arguments.images, out=arguments.out)
    print(f"validation µAP {result.initial} → {result.best}; training helped: {result.gained}")
    with Bank(model=arguments.out) as bank:
        print(f"trained: {bank.encoder.dim} dimensions, fingerprint {bank.encoder.fingerprint}")


if __name__ == "__main__":
    main()
