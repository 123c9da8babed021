"""Train the shipped model further on images like yours, then use the result in a bank.

python examples/fine_tune.py photos/ --out run/ --steps 150

A few thousand images and some minutes on two CPU cores; the report in run/ says whether it helped.
"""

import argparse

from sscd_vec import Bank, models
from sscd_vec.trainer import TrainConfig, Trainer


def main() -> None:
    """Start from the shipped weights, train, and open a bank with the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", help="folder, tar shards or list of images")
    parser.add_argument("--out", default="run")
    parser.add_argument("--steps", type=int, default=150)
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
        learning_rate=1e-4,  # higher rates first undo what the weights know
        batch=arguments.batch,
        steps=arguments.steps,
        entropy_weight=10.0,
        frozen_stages=2,
        frozen_batch_norm=True,
        ema=0.98,
        holdout=0.1,
    )
    Trainer(config).fit(arguments.images, out=arguments.out)
    with Bank(model=arguments.out) as bank:
        print(f"trained: {bank.encoder.dim} dimensions, fingerprint {bank.encoder.fingerprint}")


if __name__ == "__main__":
    main()
