"""What exists: sites, the operations that they offer, and the code behind them."""
