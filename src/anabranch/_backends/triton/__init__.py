"""What the Triton backends share: facts about a device, descriptors, and the schedule of a grouped GEMM."""
