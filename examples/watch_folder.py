"""Look at a folder on a schedule: add what is new, and say which new images are copies.

python examples/watch_folder.py uploads/ --bank known.faiss --every 60

For cron or systemd, leave out --every: one pass, then exit.
"""

import argparse
import time

from sscd_vec import Bank
from sscd_vec.files import find_images


def check(bank: Bank, folder: str) -> int:
    """Search for images the bank does not have yet, report copies, then add them all."""
    new = [file for file in find_images(folder) if file.id not in bank]
    copies = 0
    for answer in bank.search_many(new, k=1):
        if answer.matches and answer.matches[0].is_copy:
            copies += 1
            best = answer.matches[0]
            print(f"{answer.image} is a copy of {best.id} (score {best.score:.3f})", flush=True)
    bank.add(folder)
    return copies


def main() -> None:
    """Look at the folder once, or again and again with a pause between."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where new images arrive")
    parser.add_argument("--bank", default="known.faiss")
    parser.add_argument("--every", type=float, help="seconds between passes; one pass by default")
    arguments = parser.parse_args()

    with Bank(arguments.bank) as bank:  # other processes may use the bank meanwhile
        while True:
            copies = check(bank, arguments.folder)
            print(f"{copies} new copies, {len(bank)} images in the bank", flush=True)
            if arguments.every is None:
                return
            time.sleep(arguments.every)


if __name__ == "__main__":
    main()
