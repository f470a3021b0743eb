"""`python -m fastvit_triton`, which is the command `fastvit-triton`."""

from .cli import main

raise SystemExit(main())
