"""`python -m fastvit_triton.cli`."""

from . import main

raise SystemExit(main())
