"""Settings: `base` reads the environment, `dev` is the one-machine demo, `test` the tests, `prod` a real deployment."""
