"""Check for the Java that Spark needs, before a run starts that would fail without it."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: The oldest Java that Spark 4 supports.
OLDEST: Final = 17
_REMEDY: Final = (
    f"Install a JDK of version {OLDEST} or newer (Debian, Ubuntu: apt-get install "
    f"openjdk-{OLDEST}-jre-headless; macOS: brew install openjdk@{OLDEST}), set JAVA_HOME if it is "
    "not on the PATH, and restart the process; or set spark.remote of the resource `spark` to a "
    "Spark Connect server."
)
_VERSION: Final = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)


def lacks(environment: Mapping[str, str] = os.environ) -> str:
    """Return why Spark cannot start a JVM, with the remedy; an empty text if it can.

    Looks where Spark's own script looks: in JAVA_HOME if it is set, else on the PATH.
    """
    home = environment.get("JAVA_HOME")
    if home:
        found = shutil.which(str(Path(home) / "bin" / "java"))
        missing = f"JAVA_HOME is {home}, which has no bin/java."
    else:
        found = shutil.which("java", path=environment.get("PATH", ""))
        missing = "There is no java on the PATH, and JAVA_HOME is not set."
    if found is None:
        return f"Spark needs a JDK. {missing} {_REMEDY}"
    version = _version(Path(found).resolve())
    if version is not None and version < OLDEST:
        return f"Spark needs a JDK {OLDEST} or newer; {found} is Java {version}. {_REMEDY}"
    return ""


def _version(java: Path) -> int | None:
    """Return the major version from the JDK's ``release`` file; None if there is none."""
    try:
        stated = _VERSION.search((java.parents[1] / "release").read_text(errors="replace"))
    except OSError:
        return None
    return int(stated[1]) if stated else None
