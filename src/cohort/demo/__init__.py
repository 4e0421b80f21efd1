"""The demo: a tiny base model, the word problems it learns, and the means to rebuild both from nothing."""
