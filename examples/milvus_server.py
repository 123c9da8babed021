"""The same bank in a Milvus server: vectors in a collection that other programs can search too.

python examples/milvus_server.py photos/ upload.jpg --server http://localhost:19530
"""

import argparse

from sscd_vec import Bank, Encoder, MilvusCollection, Normalizer


def main() -> None:
    """Fill a collection through a bank, then search it without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", help="folder of the known images")
    parser.add_argument("query", help="the image in question")
    parser.add_argument("--server", default="http://localhost:19530")
    parser.add_argument("--collection", default="known")
    parser.add_argument("--token", default="", help="user:password or an API key")
    arguments = parser.parse_args()

    address = f"{arguments.server}/{arguments.collection}"
    with Bank(address, index="HNSW", token=arguments.token) as bank:
        bank.add(arguments.images)
        print(
            "bank:", [(match.id, round(match.score, 3)) for match in bank.search(arguments.query)]
        )

    # A service that only searches needs the collection, the model and the normalizer.
    encoder, normalizer = Encoder.from_pretrained(), Normalizer.from_pretrained()
    with MilvusCollection(
        arguments.server, arguments.collection, normalizer, token=arguments.token
    ) as collection:
        matches = collection.search(encoder.encode(arguments.query), k=5)
        print("collection:", [(match.id, round(match.score, 3)) for match in matches[0]])


if __name__ == "__main__":
    main()
