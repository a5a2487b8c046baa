"""Search for a shape: hard budget, predicted quality, measured time, Optuna, front and picks.

The way in is :func:`deepthin.search.run.run_search` with a :class:`deepthin.search.config.SearchConfig`; nothing is imported
here, because ``run`` loads Optuna.
"""
