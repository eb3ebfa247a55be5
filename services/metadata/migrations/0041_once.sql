-- What a client's request has created is remembered with its name, in `attempts`, for as long as that table.

DROP TABLE create_keys;
