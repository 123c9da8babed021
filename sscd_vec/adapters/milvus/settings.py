"""A collection's schema and settings: what is written into it when it is made, and read back.

Milvus cannot be asked which normalizer made its vectors, so the collection carries that itself, as
a property (Lite forgets descriptions, not properties).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pymilvus import CollectionSchema, DataType, MilvusClient

from sscd_vec.adapters.arguments import IdType, check_fingerprint
from sscd_vec.normalize import Metric, Normalizer

PROPERTY = "sscd_vec"
FORMAT = 1
ID, VECTOR = "id", "vector"
RESERVED = {ID, VECTOR}
IndexType = Literal["FLAT", "HNSW", "IVF_FLAT", "IVF_SQ8", "IVF_PQ", "AUTOINDEX"] | str
Params = Mapping[str, Any]

BUILD: dict[str, dict[str, Any]] = {
    "HNSW": {"M": 16, "efConstruction": 200},
    "HNSW_SQ": {"M": 16, "efConstruction": 200},
    "IVF_FLAT": {"nlist": 128},
    "IVF_SQ8": {"nlist": 128},
    "IVF_PQ": {"nlist": 128, "m": 32, "nbits": 8},
}
SEARCH: dict[str, dict[str, Any]] = {
    "HNSW": {"ef": 128},
    "HNSW_SQ": {"ef": 128},
    "IVF_FLAT": {"nprobe": 16},
    "IVF_SQ8": {"nprobe": 16},
    "IVF_PQ": {"nprobe": 16},
}
EXACT = {"FLAT", "GPU_BRUTE_FORCE", "BRUTE_FORCE"}
LITE = ("FLAT", "HNSW", "HNSW_SQ", "IVF_FLAT", "IVF_SQ8", "AUTOINDEX", "BRUTE_FORCE")


class ForeignCollection(ValueError):
    """A collection of this name exists, but sscd-vec did not make it or cannot read it."""


@dataclass(frozen=True)
class Settings:
    """What a collection was made with.

    Attributes:
        reference_fingerprint: Of the normalizer its vectors were made with.
        metric: ``"ip"``, ``"l2"`` or ``"cosine"``; the scores are the same.
        index_type: As Milvus names it.
        id_type: Type of the primary key.
        dim: Dimensions stored, padding included.
        params: Build parameters of the index.
        format: Of this record.
    """

    reference_fingerprint: str
    metric: Metric
    index_type: str
    id_type: IdType
    dim: int
    params: Params
    format: int = FORMAT

    @classmethod
    def choose(
        cls,
        normalizer: Normalizer,
        metric: Metric,
        index_type: str,
        params: Params | None,
        id_type: IdType,
    ) -> "Settings":
        """Settings of a new collection; IVF_PQ gets a dimension its ``m`` divides."""
        built = {**BUILD.get(index_type, {}), **(params or {})}
        dim, parts = normalizer.lifted_dim, int(built.get("m", 1))
        dim = -(-dim // parts) * parts
        return cls(normalizer.reference_fingerprint, metric, index_type, id_type, dim, built)

    @classmethod
    def read(cls, description: Mapping[str, Any], name: str) -> "Settings":
        """The settings in a collection's description.

        Raises:
            ForeignCollection: If it has none, or of another format.
        """
        text = description.get("properties", {}).get(PROPERTY)
        if text is None:
            raise ForeignCollection(
                f"collection {name!r} exists but was not made by sscd-vec, so its vectors mean "
                "something else; choose another name"
            )
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise ForeignCollection(
                f"collection {name!r}: expected format {FORMAT}, got {fields.get('format')!r}; use "
                "the version of sscd-vec that made it"
            )
        return cls(**fields)

    def check(
        self, normalizer: Normalizer, metric: Metric | None, index_type: str | None, name: str
    ) -> None:
        """Refuse a normalizer, metric or index type other than the collection's.

        Raises:
            FingerprintMismatch: If the normalizer is another.
            ValueError: If the metric or index type is another.
        """
        where = f"collection {name!r}"
        check_fingerprint(self.reference_fingerprint, normalizer, where)
        for given, stored, what in (
            (metric, self.metric, "metric"),
            (index_type, self.index_type, "index_type"),
        ):
            if given is not None and given != stored:
                raise ValueError(
                    f"{what}: {where} was made with {stored!r}, got {given!r}; leave it out, or "
                    "make another collection"
                )

    def check_lite(self) -> None:
        """Refuse an index type that Lite takes without a word, and cannot build later.

        Raises:
            ValueError: Naming those it can.
        """
        if self.index_type not in LITE:
            raise ValueError(
                f"index_type: expected one that Milvus Lite has ({', '.join(LITE)}), got "
                f"{self.index_type!r}; choose one of these, or a server"
            )

    @property
    def properties(self) -> dict[str, str]:
        """As Milvus keeps them."""
        return {PROPERTY: json.dumps({**asdict(self), "params": dict(self.params)})}

    @property
    def exact(self) -> bool:
        """Whether a search compares with every vector."""
        return self.index_type in EXACT

    def schema(self, id_length: int) -> CollectionSchema:
        """Key, vector, and whatever else as dynamic fields."""
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=True)
        if self.id_type == "str":
            schema.add_field(ID, DataType.VARCHAR, is_primary=True, max_length=id_length)
        else:
            schema.add_field(ID, DataType.INT64, is_primary=True)
        schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=self.dim)
        return schema

    def index_params(self, lite: bool) -> Any:  # noqa: ANN401 (a pymilvus type without a name)
        """The index to build. Lite keeps parameters only if they are nested once more."""
        params = MilvusClient.prepare_index_params()
        params.add_index(
            VECTOR,
            index_type=self.index_type,
            metric_type=self.metric.upper(),
            params={"params": dict(self.params)} if lite and self.params else dict(self.params),
        )
        return params

    def search_params(self, k: int, given: Params, **bounds: float) -> dict[str, Any]:
        """Parameters of one search for ``k`` neighbours, with range bounds if any."""
        params = {**SEARCH.get(self.index_type, {}), **given, **bounds}
        if "ef" in params:  # Milvus refuses ef < k
            params["ef"] = max(int(params["ef"]), k)
        return {"metric_type": self.metric.upper(), "params": params}


def require_metric(metric: Metric | None) -> None:
    """Refuse what is no metric; None is whatever the collection has.

    Raises:
        ValueError: Naming the three there are.
    """
    if metric is not None and metric not in get_args(Metric):
        raise ValueError(f"metric: expected one of {get_args(Metric)}, got {metric!r}")


def longest_id(description: Mapping[str, Any], otherwise: int) -> int:
    """Bytes a string id may have, from a collection's description."""
    for field in description.get("fields", ()):
        if field.get("name") == ID:
            return int(field.get("params", {}).get("max_length", otherwise))
    return otherwise
