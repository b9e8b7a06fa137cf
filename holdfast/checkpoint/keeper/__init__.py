"""Keeps a node's images: one process per node that seals, replicates and persists them.

It takes the digests of images that are whole, copies images to other nodes, writes them to storage,
and fetches them back. It never imports torch, runs at the lowest priority, and decides nothing: orders
come over a socket, each is carried out by a thread of its own and answered when it is done.

    orders   receives orders, carries them out, replies      exchange   images to and from other nodes
    files    checkpoints on storage                          progress   what storage delays, what hangs

It may die at any moment. Everything it knew is in the images and on storage; orders without a reply go
to the next keeper, and carrying one out twice does no harm.

Storage may hang, for ever and uninterruptibly. The thread that hangs with it is given up, and the
order is answered with an error; everything else goes on.
"""
