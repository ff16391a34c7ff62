"""How this machine's pip reaches its index, for pip in a container: prints options for podman that mount it there.

Usage: pip config list | pip_mounts.py PIP_CONF

Writes PIP_CONF, to be the container's /etc/pip.conf. Certificates, folders of wheels and indexes on disk that it names
are mounted below /machine, where they meddle with no package of the container's own.
"""

import ast
import re
import sys
from pathlib import Path

settings = {}
for line in sys.stdin:
    key, _, value = line.strip().partition("=")
    settings[key.rpartition(".")[2]] = str(
        ast.literal_eval(value)
    )  # of a later line, which is the stronger one
lines = [f"{key} = " + "\n  ".join(value.split()) for key, value in settings.items()]
text = "\n".join(["[global]", *lines, ""])
path_on_disk = re.compile(r"((?<=\s)|(?<=file://))/\S+")

conf = Path(sys.argv[1])
conf.write_text(path_on_disk.sub(lambda found: "/machine" + found[0], text))
print(f"--volume={conf.resolve()}:/etc/pip.conf:ro")
for found in path_on_disk.finditer(text):
    path = Path(found[0])
    path = path.parent if path.name == "simple" else path  # an index: its files lie beside it
    if path.exists():
        print(f"--volume={path}:/machine{path}:ro")
