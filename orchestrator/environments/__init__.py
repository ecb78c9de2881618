"""Engine environments: one virtual environment per engine, made from a requirements file."""
