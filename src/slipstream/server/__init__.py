"""The OpenAI-compatible server. `app.py` has the routes, `engine_thread.py` what is behind them."""
