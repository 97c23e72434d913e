"""Networks that Gossamer brings, each a factory for `model.factory`: "gossamer.model.networks.fit:fit" and so on."""
