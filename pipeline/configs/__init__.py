"""Ready experiments: one YAML file each, stating only its differences from the defaults."""
