"""Engine environments for a host without a package index: pack here, carry the parts, unpack there."""
