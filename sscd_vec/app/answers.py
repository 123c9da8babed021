"""The JSON the server speaks, as pydantic models: FastAPI checks, writes and describes it."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sscd_vec.bank import BankMatch
from sscd_vec.normalize import Grade

LARGEST_K, LARGEST_PAGE, LARGEST_REMOVAL, LARGEST_EXPORT = 100, 200, 10_000, 10_000
LARGEST_KEY = 2**62
LONGEST_ID, LONGEST_TEXT, LONGEST_NAME = 8192, 1000, 255

Key = Annotated[int, Field(ge=1, le=LARGEST_KEY, description="A key from a match or from /bank.")]
Id = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_ID)]
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class Problem(BaseModel):
    """What every refusal says."""

    error: str = Field(description="What was expected, what came, what to do.")


class Region(BaseModel):
    """What was copied: corners (x, y) from (0, 0), upper left, to (1, 1), lower right."""

    query: list[tuple[float, float]]
    reference: list[tuple[float, float]]


class Match(BaseModel):
    """An image of the bank that the query may be a copy of."""

    id: str = Field(description="Its id: what it was added with, or the path of its file.")
    name: str = Field(description="Its name for people: no folder of the server.")
    score: float = Field(
        description="Normalized similarity; of a verified match how sure a copy is, 0 to 1."
    )
    copy_: bool | None = Field(
        serialization_alias="copy",
        description="Whether the verdict is copy; null if nothing is calibrated.",
    )
    verdict: Grade = Field(description="copy, look (a person should), unsure (see reason) or no.")
    reason: str = Field(description="Why, in one line.")
    false_match_rate: float | None = Field(
        description="Share of strangers that score so high in a bank of this size; null if unknown."
    )
    decision: bool | None = Field(
        description="Whether a person called this pair a copy (/decide); null if nobody did."
    )
    key: int | None = Field(description="For /image and /heatmap; null if nothing can be shown.")
    verified: bool = Field(description="Whether geometry had its say (`serve --verify`).")
    region: Region | None = Field(description="What was copied; null if it is not located.")

    @classmethod
    def of(cls, match: BankMatch, name: str) -> "Match":
        """A match of the bank as the API answers it."""
        return cls(
            id=match.id,
            name=name,
            score=round(match.score, 5),
            copy_=match.is_copy,
            verdict=match.verdict,
            reason=match.reason,
            false_match_rate=match.false_match_rate,
            decision=match.decision,
            key=None if match.image is None else match.image.key,
            verified=match.evidence is not None,
            region=None if match.region is None else Region(**match.region._asdict()),
        )


class Result(BaseModel):
    """What was found for one image."""

    image: str = Field(description="The file name it was sent with, or its position.")
    digest: str = Field(description="SHA-256 of the image as it was sent, for /decide.")
    matches: list[Match]


class SearchAnswer(BaseModel):
    """Best matches of each image, in the order sent."""

    threshold: float | None = Field(description="Least score of a copy.")
    results: list[Result]


class Added(BaseModel):
    """The ids the images have now."""

    ids: list[str]


class Removal(BaseModel):
    """Which images to take out."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": ["upload:0123"]}]})
    ids: Annotated[list[Id], Field(max_length=LARGEST_REMOVAL)]


class Removed(BaseModel):
    """How many were there."""

    removed: int


class Ruling(BaseModel):
    """What a person decided about an image and one of the bank."""

    image: Digest = Field(description="SHA-256 of the image: `digest` of a search.")
    id: Id = Field(description="Id of the image of the bank.")
    is_copy: bool


class Decided(BaseModel):
    """How many pairs the bank remembers decisions about."""

    decisions: int


class DecidedPair(BaseModel):
    """A decision: two images by the SHA-256 of their content."""

    first: str
    second: str
    is_copy: bool
    score: float | None = Field(description="Null here; `sscd-vec decisions --out` adds scores.")


class DecisionFile(BaseModel):
    """All decisions, as `dedup --decisions` and `sscd-vec decisions --add` read them."""

    format: str
    normalizer: str
    pairs: list[DecidedPair]
    keep: list[str]


class ExportedRow(BaseModel):
    """A match as the page shows it."""

    image: Annotated[str, Field(max_length=LONGEST_ID)]
    rank: Annotated[int, Field(ge=1, le=LARGEST_K)]
    id: Annotated[str, Field(max_length=LONGEST_ID)]
    name: Annotated[str, Field(max_length=LONGEST_ID)]
    score: Annotated[float, Field(ge=-1e6, le=1e6)]
    threshold: Annotated[float, Field(ge=-1e6, le=1e6)]
    copy_: Annotated[bool, Field(alias="copy")]
    verdict: Grade
    reason: Annotated[str, Field(max_length=LONGEST_TEXT)]


ExportedRows = Annotated[list[ExportedRow], Field(max_length=LARGEST_EXPORT)]


class Grid(BaseModel):
    """A heatmap: bytes, row by row, over the whole image; 255 is the strongest match."""

    width: int
    height: int
    values: str = Field(description="Base64.")


class Heatmaps(BaseModel):
    """Where the image matches the one of the bank, and the reverse."""

    query: Grid
    reference: Grid


class Listed(BaseModel):
    """An image of the bank."""

    key: int
    id: str
    name: str
    bytes: int | None = Field(description="Size of its file, if it has one.")


class Page(BaseModel):
    """One page of the bank."""

    total: int
    images: list[Listed]


class ThresholdFacts(BaseModel):
    """Where the threshold comes from."""

    source: str = Field(description="given, calibrated, or none.")
    target: str | None = Field(description="What it was calibrated for.")
    wanted: float | None = Field(description="The precision or rate asked for.")
    interval: tuple[float, float] | None = Field(description="Interval of the threshold.")
    note: str = Field(description="In a sentence.")


class Info(BaseModel):
    """What is served."""

    images: int
    model: str
    threshold: float | None
    threshold_facts: ThresholdFacts
    tiles: int
    verify: bool = Field(description="Whether geometry confirms candidates.")
    read_only: bool
    parquet: bool = Field(description="Whether /parquet is there (extra `parquet`).")
    version: str


class Health(BaseModel):
    """The server is alive."""

    status: str


MEANINGS = {
    400: "The request makes no sense, or names another host; the error says why.",
    401: "The token is missing or wrong.",
    403: "The request came from another site, or the file may not be shown.",
    404: "There is no such image, or its file is gone.",
    408: "The upload was too slow.",
    413: "Too many bytes, images, pixels, ids or rows.",
    415: "Not an image of a kind that is read.",
    422: "A broken image.",
    503: "Busy; Retry-After says when to ask again.",
    507: "The server's disk is full; nothing was added.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """How OpenAPI describes refusals."""
    return {code: {"description": MEANINGS[code], "model": Problem} for code in statuses}


def upload_body(**fields: dict[str, Any]) -> dict[str, Any]:
    """How OpenAPI describes a form of images and further fields, or one image as the body."""
    image = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "properties": {"image": {"type": "array", "items": image, "minItems": 1}, **fields},
        "required": ["image", *fields],
    }
    content: dict[str, Any] = {"multipart/form-data": {"schema": form}}
    if not fields:
        content |= {kind: {"schema": image} for kind in ("image/jpeg", "image/png", "image/*")}
    return {"requestBody": {"required": True, "content": content}}
