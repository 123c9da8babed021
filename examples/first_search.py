"""Make a bank of images, then ask whether another image is a copy of one of them.

python examples/first_search.py photos/ upload.jpg --bank known.faiss
"""

import argparse

from sscd_vec import Bank


def main() -> None:
    """Add a folder, search one image, print what matches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", help="folder, tar or list of the known images")
    parser.add_argument("query", help="the image in question")
    parser.add_argument("--bank", default="known.faiss", help="or known.db, or http://host/name")
    arguments = parser.parse_args()

    with Bank(arguments.bank) as bank:
        done = bank.add(arguments.images)  # run again: only new and changed images
        print(f"{done.added} added, {done.unchanged} unchanged, {len(bank)} images in {bank}")
        for match in bank.search(arguments.query, k=5):
            print(f"{match.score:.3f}  {'copy' if match.is_copy else 'no copy':8} {match.id}")


if __name__ == "__main__":
    main()
