"""Find the threshold that gives the precision you want on pairs that people have labelled.

python examples/threshold_from_labels.py pairs.csv --images images/ --precision 0.95 \
    --out normalizer.safetensors

pairs.csv has the columns query, reference and is_copy (1 or 0); the first two name files below
--images. Use the result with Bank("known.faiss", normalizer="normalizer.safetensors").
"""

import argparse
import csv
from pathlib import Path

from sscd_vec import Encoder, Normalizer


def main() -> None:
    """Encode the pairs, calibrate, save, and say what to expect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=Path, help="CSV: query, reference, is_copy")
    parser.add_argument("--images", type=Path, default=Path())
    parser.add_argument("--precision", type=float, default=0.95)
    parser.add_argument("--out", type=Path, default=Path("normalizer.safetensors"))
    arguments = parser.parse_args()

    with arguments.pairs.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row[side] for row in rows for side in ("query", "reference")})
    position = {name: number for number, name in enumerate(names)}
    descriptors = Encoder.from_pretrained().encode([arguments.images / name for name in names])

    normalizer = Normalizer.from_pretrained().calibrate(
        descriptors[[position[row["query"]] for row in rows]],
        descriptors[[position[row["reference"]] for row in rows]],
        [row["is_copy"] == "1" for row in rows],
        precision=arguments.precision,
    )
    normalizer.save(arguments.out)
    print(normalizer.thresholds["search"])


if __name__ == "__main__":
    main()
