"""What 100 million images take: hours, nodes, bytes and money, computed from recorded rates.

    python benchmarks/scale_plan.py [--images 100000000] [--cores 256] [--core-hour 0.04]
        [--gpus 8] [--gpu-rate 2500] [--gpu-hour 1.5]

Rates come from ``results/throughput.json`` (encoding) and ``results/scale_*.json`` (duplicates,
bank). What cannot be measured here (a GPU's rate, prices) is an option, and the record names it as
assumed.
"""

import argparse
from typing import Any

import results

DIM = 512
ROW = DIM * 2 + 60  # bytes of a row of float16 in Parquet: descriptor, id, place


def main() -> None:
    """Compute the plan, print it and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=100_000_000)
    parser.add_argument("--cores", type=int, default=256)
    parser.add_argument("--core-hour", type=float, default=0.04, help="assumed price")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--gpu-rate", type=float, default=2500, help="assumed images per second")
    parser.add_argument("--gpu-hour", type=float, default=1.5, help="assumed price")
    asked = parser.parse_args()
    figures = {
        "images": asked.images,
        "assumed": {
            "core_hour": asked.core_hour,
            "gpu_hour": asked.gpu_hour,
            "images_per_second_and_gpu": asked.gpu_rate,
        },
        "stages": [
            encoding_on_cores(asked.images, asked.cores, asked.core_hour),
            encoding_on_gpus(asked.images, asked.gpus, asked.gpu_rate, asked.gpu_hour),
            *finding_duplicates(asked.images, asked.cores, asked.core_hour),
            *building_a_bank(asked.images, asked.cores, asked.core_hour),
        ],
    }
    for stage in figures["stages"]:
        print(stage)
    results.write("scale_plan", figures)


def encoding_on_cores(images: int, cores: int, price: float) -> dict[str, Any]:
    """By the rate of the model in the box, per core."""
    recorded: Any = results.read("throughput")["figures"]
    (row,) = [
        row
        for row in recorded["rows"]
        if (row["stage"], row["candidate"]) == ("encode", "ours, torch")
    ]
    rate = row["per_second"] / recorded["threads"]
    stage = _stage("encode on CPU", images / rate, cores, price)
    return stage | {"images_per_second_and_core": round(rate, 1), "bytes": images * ROW}


def encoding_on_gpus(images: int, gpus: int, rate: float, price: float) -> dict[str, Any]:
    """By an assumed rate."""
    return _stage("encode on GPU (assumed rate)", images / rate, gpus, price) | {
        "bytes": images * ROW
    }


def finding_duplicates(images: int, cores: int, price: float) -> list[dict[str, Any]]:
    """Through lists: ``n·√n`` comparisons, from the largest size that was measured."""
    row = _largest("scale_duplicates")
    seconds = row["lists_cpu_seconds"] * (images / row["images"]) ** 1.5
    stage = _stage("duplicates through lists", seconds, cores, price)
    return [stage | {"measured_at": row["images"], "bytes": images * DIM * 4}]


def building_a_bank(images: int, cores: int, price: float) -> list[dict[str, Any]]:
    """Parts of the largest size that was measured, on any number of cores, merged by one."""
    row = _largest("scale_bank")
    share = images / row["images"]
    adding = _stage("FAISS bank: add", row["adding_cpu_seconds"] * share, cores, price)
    merging = _stage("FAISS bank: merge", row["merging_cpu_seconds"] * share, 1, price)
    size = {"measured_at": row["images"], "bytes": round(row["bytes_on_disk"] * share)}
    return [adding | size, merging | size]


def _stage(name: str, core_seconds: float, workers: int, price: float) -> dict[str, Any]:
    hours = core_seconds / 3600
    return {
        "stage": name,
        "worker_hours": round(hours, 1),
        "workers": workers,
        "hours": round(hours / workers, 2),
        "cost": round(hours * price, 2),
    }


def _largest(name: str) -> dict[str, Any]:
    recorded: Any = results.read(name)["figures"]
    rows: list[dict[str, Any]] = recorded["rows"]
    return max(rows, key=lambda row: row["images"])


if __name__ == "__main__":
    main()
