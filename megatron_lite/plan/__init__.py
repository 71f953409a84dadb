"""Floor 4: predictions of time, from the description of a layer and the figures of a machine."""
