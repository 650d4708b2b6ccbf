"""Its presence puts this directory on the path: helpers are imported as `golden.tiny_models`."""
