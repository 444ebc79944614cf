"""``python -m lora_spec.smoke``."""

import sys

from lora_spec.smoke import main

if __name__ == "__main__":
    sys.exit(main())
