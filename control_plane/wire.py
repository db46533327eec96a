"""Wire and Part: what every answer of the console's API is made of. Wire format only, no logic."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Frozen. Servers may add fields; clients ignore what they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Part(Wire):
    """Something that this server may lack."""

    available: bool
    reason: str = ""
