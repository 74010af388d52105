"""What the ``kvkeep bench`` command measures: kvkeep beside the physical reference, in one run on this machine."""
