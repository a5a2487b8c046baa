"""What a token costs on a device, predicted: physical terms fitted to probes, with intervals. Pure arithmetic."""
