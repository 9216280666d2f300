"""Print what pyproject.toml requires at run time, with the extras named as arguments.

It lets an image's dependencies be a layer of their own, which a change of the code leaves alone.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
required = [*project["dependencies"]]
for extra in sys.argv[1:]:
    required += project["optional-dependencies"][extra]
print("\n".join(sorted(set(required))))
