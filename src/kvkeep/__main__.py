"""``python -m kvkeep`` is the ``kvkeep`` command."""

from kvkeep.cli import main

if __name__ == "__main__":
    main(prog_name="kvkeep")
