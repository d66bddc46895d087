"""Answer a test file and write a submission.

python answer.py TEST [key=value ...]

The answers are written to answers/, into a folder with the name of TEST. After TEST you may give
settings of the section `generate` of config.yaml, such as `in_flight=64`.
"""

import hashlib
import json
import os
import sys
from pathlib import Path


def refuse_changes(here: Path) -> None:
    """End if a file is missing or has changed since it was packed: the answers would be others."""
    for name, digest in json.loads((here / "files.json").read_bytes()).items():
        path = here / name
        if not path.is_file():
            sys.exit(f"{path}: is missing; unpack the archive again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                sys.exit(f"{path}: was changed since it was packed; unpack the archive again")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    test = str(Path(sys.argv[1]).resolve())
    here = Path(__file__).resolve().parent
    refuse_changes(here)
    os.chdir(here)  # this is the run folder
    sys.path.insert(0, str(here / "code"))
    os.environ["PYTHONPATH"] = str(here / "code")  # of the engine's processes
    from panjue.prompts.cli import __file__ as code
    from panjue.prompts.cli import main

    if not Path(code).is_relative_to(here):
        sys.exit(f"another panjue is in the way: {code}")
    sys.argv = ["panjue", "generate", ".", test, *sys.argv[2:]]
    main()
