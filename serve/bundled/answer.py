"""One command: a test file in, a submission out.

python answer.py TEST OUT [key=value ...]

OUT is a folder; settings of generate.yaml may be given behind it, as `in_flight=64`.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    test, out = (str(Path(word).resolve()) for word in sys.argv[1:3])
    here = Path(__file__).resolve().parent
    os.chdir(here)  # the paths in generate.yaml are meant from here
    sys.path.insert(0, str(here / "code"))
    os.environ["PYTHONPATH"] = str(here / "code")  # of the engine's processes
    from panjue.prompts.cli import __file__ as code
    from panjue.prompts.cli import main

    if not Path(code).is_relative_to(here):
        sys.exit(f"another panjue is in the way: {code}")
    sys.argv = ["panjue", "generate", "generate.yaml", f"test={test}", f"run={out}", *sys.argv[3:]]
    main()
