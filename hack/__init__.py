"""What serves developers only: local cluster, image build, demo driver, training, document generators."""
