"""The head of a language model in training: logits that are computed only where something reads them."""
