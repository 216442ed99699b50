"""L4: live training state, taken apart and put back together. Torch starts here.

flatten (names, optim, arrays) -> plan -> staging / cuda -> snapshot hands over to the writer; stored -> match -> reader
-> restore brings it back; data, order, seeding and rng keep the position in data and random numbers.
May import writer, checkpoint, format, storage, errors.
"""
