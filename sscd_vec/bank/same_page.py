"""A close look at two images that geometry has aligned and whose scores say little.

Two pages of one form share lines and boxes, so an alignment alone makes no copies of documents,
charts and screens. Their pixels do, laid on each other by that alignment (``verify.everywhere``).
"""

import numpy as np

from sscd_vec.bank.exact import load_prepared
from sscd_vec.encoder.images import ImageError, ImageInput
from sscd_vec.normalize import Proof
from sscd_vec.verify import Evidence
from sscd_vec.verify.everywhere import agree_everywhere


def look_closely(
    query: "ImageInput | None", reference: "ImageInput | None", evidence: Evidence | None
) -> Proof | None:
    """What the aligned pixels say: the same everywhere, different in many places, or neither.

    Args:
        query: The image that geometry took as the query; None if it is not at hand.
        reference: The other one, likewise.
        evidence: What geometry says.

    Returns:
        None if there is nothing to compare.
    """
    if query is None or reference is None or evidence is None or evidence.transform is None:
        return None
    try:
        first, second = load_prepared(query), load_prepared(reference)
    except ImageError as error:  # gone, or changed since it was added
        return Proof(None, f"their pixels could not be compared: {error.reason}", "geometry")
    found = agree_everywhere(first, second, np.array(evidence.transform))
    return Proof(found.is_copy, found.reason, "geometry")
