// The page begins when all its parts are there.
build();
