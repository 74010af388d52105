"""What the ``kvkeep demo`` command runs, and the small real models it runs on."""
