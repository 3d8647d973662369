"""What `make serve` serves beside the default model: three adapters, the data they learned from, and their measure."""
