"""Parts of torch that are replaced while steps run."""
