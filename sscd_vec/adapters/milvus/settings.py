"""A collection's schema and settings: written into it when it is made, and read back.

Milvus does not know which normalizer made its vectors, so the collection carries that itself, as a
property (Lite forgets descriptions, not properties). An adopted collection has no such property:
there the settings come from its schema.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np
from pymilvus import CollectionSchema, DataType, MilvusClient

from sscd_vec.adapters.arguments import Float32, IdType, check_fingerprint
from sscd_vec.normalize import Metric, Normalizer

PROPERTY = "sscd_vec"
FORMAT = 1
ID, VECTOR, METADATA = "id", "vector", "$meta"
VectorType = Literal["float32", "float16", "bfloat16"]
IndexType = Literal["FLAT", "HNSW", "IVF_FLAT", "IVF_SQ8", "IVF_PQ", "AUTOINDEX"] | str
Params = Mapping[str, Any]

BUILD: dict[str, dict[str, Any]] = {
    "HNSW": {"M": 16, "efConstruction": 200},
    "HNSW_SQ": {"M": 16, "efConstruction": 200},
    "IVF_FLAT": {"nlist": 128},
    "IVF_SQ8": {"nlist": 128},
    "IVF_PQ": {"nlist": 128, "m": 32, "nbits": 8},
    "IVF_RABITQ": {"nlist": 1024, "refine": True, "refine_type": "SQ8"},
}
SEARCH: dict[str, dict[str, Any]] = {
    "HNSW": {"ef": 128},
    "HNSW_SQ": {"ef": 128},
    "IVF_FLAT": {"nprobe": 16},
    "IVF_SQ8": {"nprobe": 16},
    "IVF_PQ": {"nprobe": 16},
    "IVF_RABITQ": {"nprobe": 64, "refine_k": 8},
    "DISKANN": {"search_list": 100},
}
# The first server that has it; what is not here all of them have.
SINCE: dict[str, tuple[int, int]] = {
    "float16": (2, 4),
    "bfloat16": (2, 4),
    "HNSW_SQ": (2, 5),
    "HNSW_PQ": (2, 5),
    "IVF_RABITQ": (2, 6),
}
_FIELDS = {
    "float32": DataType.FLOAT_VECTOR,
    "float16": DataType.FLOAT16_VECTOR,
    "bfloat16": DataType.BFLOAT16_VECTOR,
}
EXACT = {"FLAT", "GPU_BRUTE_FORCE", "BRUTE_FORCE"}
_KEPT = (
    "reference_fingerprint", "metric", "index_type", "id_type", "dim", "params", "format",
    "vector_type",
)  # fmt: skip
LITE = ("FLAT", "HNSW", "HNSW_SQ", "IVF_FLAT", "IVF_SQ8", "AUTOINDEX", "BRUTE_FORCE")


class ForeignCollection(ValueError):
    """A collection of this name exists, but sscd-vec did not make it or cannot read it."""


@dataclass(frozen=True)
class Settings:
    """What a collection was made with.

    Attributes:
        reference_fingerprint: Of the normalizer its vectors were made with; empty if adopted.
        metric: ``"ip"``, ``"l2"`` or ``"cosine"``; the scores are the same.
        index_type: As Milvus names it.
        id_type: Type of the primary key.
        dim: Dimensions stored, padding included.
        params: Build parameters of the index.
        format: Of this record.
        id_field: Name of the primary key.
        vector_field: Name of the vectors.
        metadata_fields: Names of the rest; ``$meta`` stands for all dynamic fields.
        plain: Whether it was adopted and holds plain descriptors.
        makes_ids: Whether Milvus makes up the ids, so that none can be added.
        vector_type: What a number of a vector is kept as.
    """

    reference_fingerprint: str
    metric: Metric
    index_type: str
    id_type: IdType
    dim: int
    params: Params
    format: int = FORMAT
    id_field: str = ID
    vector_field: str = VECTOR
    metadata_fields: tuple[str, ...] = (METADATA,)
    plain: bool = False
    makes_ids: bool = False
    vector_type: VectorType = "float32"

    @classmethod
    def choose(
        cls,
        normalizer: Normalizer,
        metric: Metric,
        index_type: str,
        params: Params | None,
        id_type: IdType,
        vector_type: VectorType = "float32",
    ) -> "Settings":
        """Settings of a new collection; IVF_PQ gets a dimension its ``m`` divides."""
        built = {**BUILD.get(index_type, {}), **(params or {})}
        dim, parts = normalizer.lifted_dim, int(built.get("m", 1))
        dim = -(-dim // parts) * parts
        return cls(
            normalizer.reference_fingerprint,
            metric,
            index_type,
            id_type,
            dim,
            built,
            vector_type=vector_type,
        )

    @classmethod
    def read(cls, description: Mapping[str, Any], name: str) -> "Settings":
        """The settings in a collection's description.

        Raises:
            ForeignCollection: If it has none, or of another format.
        """
        text = description.get("properties", {}).get(PROPERTY)
        if text is None:
            raise ForeignCollection(
                f"collection {name!r} exists but was not made by sscd-vec; choose another name, or "
                "if it holds plain descriptors use MilvusCollection.adopt"
            )
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise ForeignCollection(
                f"collection {name!r}: expected format {FORMAT}, got {fields.get('format')!r}; use "
                "the version of sscd-vec that made it"
            )
        return cls(**fields)

    @classmethod
    def adopt(
        cls,
        description: Mapping[str, Any],
        index: Mapping[str, Any],
        id_field: str,
        vector_field: str,
    ) -> "Settings":
        """The settings of someone else's collection of plain descriptors.

        Raises:
            ForeignCollection: If its fields are of other types, or its metric gives no scores.
        """
        what = f"collection {description['collection_name']!r}"
        fields = {field["name"]: field for field in description["fields"]}
        key, vector = fields.get(id_field), fields.get(vector_field)
        kinds = {DataType.VARCHAR: "str", DataType.INT64: "int"}
        if key is None or not key.get("is_primary") or key["type"] not in kinds:
            raise ForeignCollection(
                f"adopt: expected a primary key {id_field!r} of integers or strings in {what}, "
                f"which has the fields {sorted(fields)}"
            )
        if vector is None or vector["type"] != DataType.FLOAT_VECTOR:
            raise ForeignCollection(
                f"adopt: expected float vectors {vector_field!r} in {what}, which has the fields "
                f"{sorted(fields)}"
            )
        metric = str(index.get("metric_type", "")).lower()
        if metric not in get_args(Metric):
            raise ForeignCollection(f"adopt: expected IP, L2 or COSINE, got {metric!r} in {what}")
        rest = [name for name in fields if name not in (id_field, vector_field)]
        dynamic = [METADATA] if description.get("enable_dynamic_field") else []
        return cls(
            "",
            cast(Metric, metric),
            str(index.get("index_type")),
            cast(IdType, kinds[key["type"]]),
            int(vector["params"]["dim"]),
            {},
            id_field=id_field,
            vector_field=vector_field,
            metadata_fields=(*rest, *dynamic),
            plain=True,
            makes_ids=bool(key.get("auto_id") or description.get("auto_id")),
        )

    def check(
        self,
        normalizer: Normalizer,
        metric: Metric | None,
        index_type: str | None,
        vector_type: VectorType | None,
        name: str,
    ) -> None:
        """Refuse a normalizer, metric, index type or vector type other than the collection's.

        Raises:
            FingerprintMismatch: If the normalizer is another.
            ValueError: If one of the others is another.
        """
        where = f"collection {name!r}"
        check_fingerprint(self.reference_fingerprint, normalizer, where)
        for given, stored, what in (
            (metric, self.metric, "metric"),
            (index_type, self.index_type, "index_type"),
            (vector_type, self.vector_type, "vector_type"),
        ):
            if given is not None and given != stored:
                raise ValueError(
                    f"{what}: {where} was made with {stored!r}, got {given!r}; leave it out, or "
                    "make another collection"
                )

    def check_lite(self) -> None:
        """Refuse an index type that Lite accepts silently and cannot build later.

        Raises:
            ValueError: Naming those it can.
        """
        if self.index_type not in LITE:
            raise ValueError(
                f"index_type: expected one that Milvus Lite has ({', '.join(LITE)}), got "
                f"{self.index_type!r}; choose one of these, or a server"
            )
        if self.vector_type != "float32":
            raise ValueError(
                f"vector_type: Milvus Lite has float32 only, got {self.vector_type!r}; leave it "
                "out, or use a server"
            )

    def check_server(self, version: str) -> None:
        """Refuse what a server of this version does not have.

        Raises:
            ValueError: Naming the first that does.
        """
        found = re.match(r"v?(\d+)\.(\d+)", version)
        if found is None:  # a version without a number: let the server say it
            return
        has = int(found[1]), int(found[2])
        for name, what in ((self.vector_type, "vector_type"), (self.index_type, "index_type")):
            since = SINCE.get(name, has)
            if has < since:
                raise ValueError(
                    f"{what}: {name} needs Milvus {since[0]}.{since[1]} or newer, this server is "
                    f"{version}; choose another, or update the server"
                )

    def decoded(self, vectors: Sequence[Any]) -> Float32:
        """Vectors as they come back: numbers, or bytes of 16 bits each."""
        if vectors and isinstance(vectors[0], bytes):
            vectors = [np.frombuffer(vector, self.dtype) for vector in vectors]
        return np.array(vectors).astype(np.float32)

    @cached_property
    def dtype(self) -> Any:  # noqa: ANN401 - numpy has no bfloat16 of its own
        """Numbers of the vectors as they are sent.

        Raises:
            ImportError: bfloat16 needs a package that numpy does without.
        """
        if self.vector_type != "bfloat16":
            return np.dtype(self.vector_type)
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise ImportError("bfloat16 vectors need ml_dtypes: pip install ml-dtypes") from error
        return np.dtype(bfloat16)

    @property
    def properties(self) -> dict[str, str]:
        """As Milvus keeps them."""
        kept = {name: getattr(self, name) for name in _KEPT}
        return {PROPERTY: json.dumps({**kept, "params": dict(self.params)})}

    def schema(self, id_length: int) -> CollectionSchema:
        """Key, vector, and whatever else as dynamic fields."""
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=True)
        if self.id_type == "str":
            schema.add_field(ID, DataType.VARCHAR, is_primary=True, max_length=id_length)
        else:
            schema.add_field(ID, DataType.INT64, is_primary=True)
        schema.add_field(VECTOR, _FIELDS[self.vector_type], dim=self.dim)
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


def require_metric(metric: Metric | None) -> None:
    """Refuse what is not a metric; None is whatever the collection has.

    Raises:
        ValueError: Naming the three there are.
    """
    if metric is not None and metric not in get_args(Metric):
        raise ValueError(f"metric: expected one of {get_args(Metric)}, got {metric!r}")


def require_vector_type(vector_type: VectorType | None) -> None:
    """Refuse what is not a type of vector; None is whatever the collection has.

    Raises:
        ValueError: Naming the three there are.
    """
    if vector_type is not None and vector_type not in get_args(VectorType):
        raise ValueError(
            f"vector_type: expected one of {get_args(VectorType)}, got {vector_type!r}"
        )


def longest_id(description: Mapping[str, Any], id_field: str, otherwise: int) -> int:
    """Bytes a string id may have, from a collection's description."""
    for field in description.get("fields", ()):
        if field.get("name") == id_field:
            return int(field.get("params", {}).get("max_length", otherwise))
    return otherwise
