"""The page of a run: reads run folders, live or afterwards, and serves them to a browser.

Only reads: the trainer knows nothing of the page. No torch here, so that the page starts fast and stays small.
"""
