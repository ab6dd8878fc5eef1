"""NYC flights of 2013: departures in, aircraft rotations and late aircraft out."""

from pathlib import Path
from typing import Final

#: The folder from which `rmq_pipeline` is imported.
CHECKOUT: Final = Path(__file__).resolve().parents[3]
