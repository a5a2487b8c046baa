"""Facts about devices that are not here, one TOML file each; read by ``profiles.device_facts``."""
