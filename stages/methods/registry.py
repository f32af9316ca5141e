"""All methods: the union of their configs, told apart by ``name``."""

from typing import Annotated

from pydantic import Field

from stages.methods.apincse import APINCSEConfig
from stages.methods.simcse import SimCSEConfig

MethodConfig = Annotated[APINCSEConfig | SimCSEConfig, Field(discriminator="name")]
