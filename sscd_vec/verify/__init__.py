"""The second stage: geometry confirms candidates and shows what was copied.

    verifier = Verifier.from_pretrained()
    query = verifier.extract(pixels)
    evidence = verifier.compare(query, verifier.extract(other), descriptor_score=0.41)
    evidence.score, evidence.is_copy, evidence.query_region

Needs OpenCV (``pip install 'sscd-vec[verify]'``), which is imported at the first ``extract``.
"""

from sscd_vec.verify.features import Features, FeaturesError
from sscd_vec.verify.regions import Polygon, Region
from sscd_vec.verify.scoring import Combination, Weights, WeightsError
from sscd_vec.verify.store import FeatureStore, FeatureStoreError
from sscd_vec.verify.verifier import Candidate, Evidence, Relation, Verified, Verifier, is_available

__all__ = [
    "Candidate",
    "Combination",
    "Evidence",
    "FeatureStore",
    "FeatureStoreError",
    "Features",
    "FeaturesError",
    "Polygon",
    "Region",
    "Relation",
    "Verified",
    "Verifier",
    "Weights",
    "WeightsError",
    "is_available",
]
