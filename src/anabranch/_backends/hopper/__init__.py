"""What the Hopper backends share: Gluon whatever its release, descriptors, and the parts of a pipeline."""
