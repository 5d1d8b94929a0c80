"""One folder an op, the same file names in each: api, call, autograd, reference, config, cases, backends."""
