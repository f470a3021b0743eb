"""How a block runs: reads its modules (`leaves`, `body`), selects a way (`ways`), runs it (`branch`) and replays it."""
