"""Build hook: puts the files of htmx, which the web page uses, into rmq_pipeline/web/static.

They come from the package django-htmx. The editable install of `make setup` runs the hook, too, so
a checkout has them. Git does not: they are not ours.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: In the package, and in rmq_pipeline/web/static.
FILES = {"htmx-2.min.js": "htmx.js", "ext/hx-sse-2.min.js": "htmx-sse.js"}


class HtmxHook(BuildHookInterface[Any]):
    """Copies the files, and adds them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Copy the files before a build.

        Raises:
            RuntimeError: django-htmx is not installed where the build runs.
        """
        static = Path(self.root) / "rmq_pipeline" / "web" / "static"
        found = find_spec("django_htmx")
        if found is None or not found.submodule_search_locations:
            raise RuntimeError("The build needs the package django-htmx.")
        source = Path(found.submodule_search_locations[0]) / "static" / "django_htmx"
        for name, ours in FILES.items():
            shutil.copyfile(source / name, static / ours)
            build_data["artifacts"].append(f"rmq_pipeline/web/static/{ours}")
